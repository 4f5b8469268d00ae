"""A step decided again: explained from the journal, and replayed under the recorded rules or others.

facts       everything the journal says about one step (a fold)
rules       what may be changed: RL360's rules, and those of older systems by name
decide      the step under a set of rules, by the functions that the workers call
reproduce   the recorded decisions, made again and compared bit for bit
compare     two decisions side by side
explain     where the gradient went, as data; `text` and `page` show it
gradient    the real gradient of the stored samples under a set of rules (needs the trainer's packages)
into        a step's events in a journal of their own, for live workers
"""
