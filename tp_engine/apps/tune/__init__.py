"""``tp-engine tune``: kernels are proven and timed on this device, before an engine starts."""
