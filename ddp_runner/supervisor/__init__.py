"""PARENT: spawns, watches, decides through core, acts. Knows no torch.

run         signals, selector, the loop                 supervisor  what happens on each event
world       all processes as one thing to act on        repair      from a fault to replacements
children    starting, reaping, killing                  zygotes     always one at hand
hangs       who hangs, anywhere in its life             watcher     who hangs or straggles while it trains
stopped     whom the system holds stopped
ranks       one rank as the supervisor sees it          striker     what --inject still owes
claim       directories, lock, port, the board's memory environment what stands before torch
returning   slots that were given up, and come back     ledger      time, faults, the summary
facts       what is known of the run                    views       one look at everything
records     every file and screen that shows the run    sparing     one more process at hand, in peace
chronicle   what ranks tell, in every record            helpers     the store host, and that process
departures  whose process has ended                     published   saves that nobody has told of
endings     how a rank ended, by its last words         incident    one thing that goes wrong
stacks      where those stand who answer nothing        run_end     how it ends, and when
last_save   the save before an end
"""
