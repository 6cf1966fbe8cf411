"""The project's own decoder: position methods, caches, rows of texts, and models."""
