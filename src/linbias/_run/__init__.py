"""What everything that writes to disk shares.

files        whole files, logs that grow line by line, fingerprints     (standard library only)
folders      a run's folder: held by one run at a time, and new or of the very same run
processes    which of several processes this is (torchrun)
progress     a bar or lines on standard error                          (Rich only)
hub          whether the Hugging Face Hub answers
"""
