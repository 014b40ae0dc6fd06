"""Chats: messages to a prompt through a template; generated text to a message with reasoning and tool calls."""
