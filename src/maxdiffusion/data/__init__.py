"""Sources of captioned pictures and the batches drawn from them."""
