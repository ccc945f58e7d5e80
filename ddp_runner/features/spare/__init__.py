"""Keeps a warm process at hand that becomes the next lost rank."""
