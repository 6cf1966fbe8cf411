"""Who computes: one module for each implementation, none of which knows another; `call.py` asks
`choice.py` for one.
"""
