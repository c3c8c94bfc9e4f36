"""Guides: what holds an output to a form. Alone in importing xgrammar, and only when a guide is there.

`compiler.py` runs in the guide compiler's process, `matcher.py` in an engine; both see the same `vocabulary.py`.
"""
