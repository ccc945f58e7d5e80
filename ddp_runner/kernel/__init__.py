"""Keeps the promise: processes that are watched, a group that can be aborted, a step that counts once, a state that is handed on."""
