"""DECIDES: pure rules, values in, values out. No torch, clock, files, processes, threads, logging.

faults      the one vocabulary for what goes wrong        phases      what a rank is doing
lifecycle   state tables of the run and of a rank         board       layout of the progress board
classify    facts about a failure -> Fault, culprit       messages    control messages and codec
recovery    Fault + history + budget -> Plan              exits       exit codes and run statuses
election    who hands its state to whom                   duties      what is due at a step
watch       who is hung                                   straggler   who is persistently slow
divergence  whose replica is the odd one                  pressure    levels of memory use
leak        slow, steady growth                           injection   faults on request
launch      a checked run, ready to start                 settings    every setting, its legal range
spare       when a process is kept at hand                wishes    saves that were asked for
last_save   who saves before a run ends, and its last line   stopping  which signals mean "at once"
"""
