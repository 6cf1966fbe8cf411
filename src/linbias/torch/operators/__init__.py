"""What implementations share: custom operators, autograd, transforms, and when a call may do
without them.
"""
