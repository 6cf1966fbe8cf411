"""What every run needs, written once: files, folders, checkpoints, training, progress and memory.

hub          whether the Hugging Face Hub answers
files        whole files, logs that grow line by line, fingerprints     (standard library only)
progress     a bar or lines on standard error                          (Rich only)
processes    which of several processes this is
tables       tables for terminals of any width                        (Rich only)
folders      a run's folder: held by one run at a time, and new or of the very same run
checkpoints  which checkpoints are complete and undamaged, and which may go
training     what every run on Transformers' Trainer does alike
watch        callbacks: progress, the history of the loss, a check of it, the schedule, a stop watch
memory       peak and available memory
"""

PRECISIONS = ("fp32", "bf16", "fp16")  # of matrix products in training
DEVICES = ("auto", "cpu")  # "auto" takes an accelerator where there is one
