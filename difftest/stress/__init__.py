"""Campaigns on engines: healthy ones must stay silent, injected faults must be found, and a failing canary unnoticed.

They are run from a checkout and do not come with an installed package.
"""
