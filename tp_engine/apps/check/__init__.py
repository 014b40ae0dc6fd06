"""``tp-engine check``: whether a machine or a server answers correctly, beside transformers in float32."""
