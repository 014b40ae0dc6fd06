"""Anthropic's Messages API: a message is answered by a chat, and the chat's answer becomes blocks."""
