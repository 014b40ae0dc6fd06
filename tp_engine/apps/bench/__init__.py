"""``tp-engine bench``: what an engine and a server do on this machine, beside other engines, in one run."""
