"""Text as tokens.

    corpus, tokenizers, segments     any text as bytes or byte pairs, for `linbias.lm`
    dictionary, store, prepare,      text as words, in the files of the paper's code (fairseq), for
      ranges, blocks, batches          `linbias.paper`
    hub                              the data sets that both can read by name
    reading                          how a model reads a long text: windows and batches of them

Importing this, or what `prepare` needs, does not import torch: worker processes start quickly.
"""

SPLITS = ("train", "valid", "test")
