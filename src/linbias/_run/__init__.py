"""What all that writes to disk shares: whole files, logs, run folders, processes, progress."""
