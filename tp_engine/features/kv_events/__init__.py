"""KV events: routers are told what the prefix cache holds (docs/kv_events.md)."""
