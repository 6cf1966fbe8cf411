"""`embed`, vectors of documents: documents.py reads these, vectors.py writes those."""
