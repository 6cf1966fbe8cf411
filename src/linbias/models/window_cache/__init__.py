"""A cache of a fixed size for endless texts: what heads can reach stays, and what is dropped is accounted for."""
