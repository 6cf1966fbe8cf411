"""What runs fastest: the compiled core's calling convention (`core`) and the Triton kernels
(`triton`).
"""
