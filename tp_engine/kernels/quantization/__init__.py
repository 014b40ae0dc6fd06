"""Weights and rows of activations as codes with scales, and products with them."""
