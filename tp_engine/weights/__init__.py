"""From checkpoint to this rank's tensors.  The only door to safetensors."""
