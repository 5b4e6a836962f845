"""Readers of sources: the documents of text files, of rows and of chats, and files of token IDs."""
