"""The project's own decoder: position methods, caches, packing, and models."""
