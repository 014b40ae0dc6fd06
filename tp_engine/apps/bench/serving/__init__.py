"""A server under several request rates: traffic, client, figures and plot."""
