"""The trainer of ``foreign_trainer.py`` in place: its hooks begin and end the steps. Harm is at hand."""

import os

import torch
from foreign_trainer import EPOCHS, Trainer, loader, parts

import ddp_runner


class InPlace(Trainer):
    """An integration: nothing of the loop is written again."""

    def __init__(self, run, net, optimizer, scheduler):
        super().__init__(net, optimizer, scheduler)
        self.run = run

    def state_dict(self):
        return {"global_step": self.global_step}

    def load_state_dict(self, state):
        self.global_step = state["global_step"]

    def on_step_begin(self):
        self.run.begin_step()

    def on_step_end(self):
        harm(self.run, "update")
        self.run.end_step()
        assert self.run.step_number == self.global_step + 1, "called once for each committed step"
        harm(self.run, "between")

    def training_step(self, batch):
        harm(self.run, "forward")
        return super().training_step(batch)

    def fit(self, batches):
        while not self.run.has_ended:
            try:
                super().fit(batches)
            except BaseException as error:  # noqa: PERF203 - the loop is entered again
                if not self.run.fail_step(error):
                    raise


def harm(run, where):
    """Do once what a file ``harm_RANK_STEP_WHERE`` says, if there is one."""
    path = f"harm_{run.rank}_{run.step_number}_{where}"
    if os.path.exists(path):
        with open(path) as file:
            text = file.read()
        os.rename(path, f"done_{path}")
        exec(text)


def main():
    """Train as the framework's own script does."""
    run = ddp_runner.attach()
    model, optimizer, scheduler = parts()
    trainer = InPlace(run, run.ddp(model), optimizer, scheduler)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, trainer=trainer)
    trainer.fit(run.steps(loader(run.world_size, run.rank), epochs=EPOCHS))
    if run.is_first:
        torch.save({"model": model.state_dict(), "steps": trainer.global_step}, "final.pt")


main()
