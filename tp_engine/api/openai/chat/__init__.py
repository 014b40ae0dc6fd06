"""Chats: messages become a prompt, generated text becomes a message with reasoning and tool calls."""
