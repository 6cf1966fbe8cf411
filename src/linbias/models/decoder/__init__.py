"""The project's own decoder: position methods, caches, padding and packing, and the models that are made of it."""
