"""The live page: a web server of its own process over the files of runs. Needs the extra ``page``; slows no rank.

``access`` decides who may ask, and knows no page; ``site`` puts it together; ``overview``, ``one_run`` and the
``*_panel`` modules draw. What a run says is only ever set as text.
"""
