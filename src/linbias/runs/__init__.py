"""What every run needs: folders, whole files, checkpoints, resuming, watching, memory."""
