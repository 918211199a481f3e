"""Documented bugs of real engines, each built into a running engine and found, or shown not to be visible."""
