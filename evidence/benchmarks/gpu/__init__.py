"""What bench_gpu.py is made of: stages, peers, how a case is checked and timed, and the page."""
