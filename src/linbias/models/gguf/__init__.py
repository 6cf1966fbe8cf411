"""Models with ALiBi in GGUF files, as llama.cpp's converter writes them."""
