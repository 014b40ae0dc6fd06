"""``tp-engine check``: whether what a machine, or a server, answers is right, beside transformers in float32."""
