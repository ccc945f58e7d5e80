"""SHOWS: what people and scripts see of a run. Decides nothing, knows no torch, never stops a run.

logger      a line per event in a rank's log, and back    journal   events.jsonl and metrics.jsonl
console     follows the rank logs, picks what is shown    status    status.json, replaced whole
tail        one growing file, whatever happens to it      view      a run and its ranks, as values
display     live, plain or no display, one protocol       summary   summary.json, written at the end
frame       layout of the live display                    live      draws it with rich, on demand
report      progress lines and the final block            terminal  output that never blocks
files       files that outlive a full disk                format    durations, bytes for people
"""
