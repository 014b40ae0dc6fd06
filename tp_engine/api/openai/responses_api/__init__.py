"""The OpenAI Responses API on top of chats: bodies become chat bodies, chat answers become items and events."""
