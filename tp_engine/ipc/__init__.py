"""How plans travel: a shared-memory ring, a fixed layout, no pickle; no torch."""
