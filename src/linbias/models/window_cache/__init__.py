"""A cache of constant size for endless texts: what heads can reach stays, the rest is counted."""
