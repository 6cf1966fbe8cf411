"""Text as tokens: corpora, tokenizers, training segments, and the data format of the paper's code (fairseq)."""
