"""What a Transformers model needs around `linbias.torch.attention`: padding and caches."""
