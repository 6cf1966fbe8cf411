"""Attention among points of a line, a plane or a space: `attention_points` and its
implementations.
"""
