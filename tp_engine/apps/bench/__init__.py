"""``tp-engine bench``: measures an engine and a server on this machine, beside other engines, in one run."""
