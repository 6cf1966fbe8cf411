"""Who computes: a module for each implementation, none of which knows another."""
