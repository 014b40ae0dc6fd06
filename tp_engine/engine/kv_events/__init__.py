"""KV events, the publishing half: what the prefix cache holds, told to routers over ZMQ in vLLM's form."""
