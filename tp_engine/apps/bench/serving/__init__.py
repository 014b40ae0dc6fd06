"""A server under request rates: traffic, client, figures and picture."""
