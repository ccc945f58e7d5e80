"""Students and their teachers."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from ddp_runner import Datasets


def net():
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 4))


@torch.no_grad()
def follow(teacher, student, rate=0.1):
    for slow, quick in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.lerp_(quick, rate)


class Distill:
    def build_datasets(self):
        x = torch.randn(48, 6, generator=torch.Generator().manual_seed(21))
        return Datasets(train=TensorDataset(x, x.argmax(1) % 4))

    def consistency(self, ours, theirs):
        return F.kl_div(ours.log_softmax(1), theirs.softmax(1), reduction="batchmean")


class TeacherInTask(Distill):
    def build_model(self):
        student = net()
        self.teacher = copy.deepcopy(student).requires_grad_(False).eval()
        return student

    def loss(self, model, batch):
        x, y = batch
        ours = model(x)
        if model.training:
            follow(self.teacher, model)
        return F.cross_entropy(ours, y) + self.consistency(ours, self.teacher(x))


class MeanTeacherNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        if self.training:
            follow(self.teacher, self.student)
        return self.student(x), self.teacher(x + 0.05 * torch.randn_like(x)).detach()


class MeanTeacher(Distill):
    def build_model(self):
        return MeanTeacherNet()

    def loss(self, model, batch):
        ours, theirs = model(batch[0])
        return F.cross_entropy(ours, batch[1]) + self.consistency(ours, theirs)


class HiddenNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = net()
        # in a list, so that it is none of our parameters
        self._teacher = [copy.deepcopy(self.student).requires_grad_(False)]

    @property
    def teacher(self):
        return self._teacher[0]

    def forward(self, x):
        if self.training:
            follow(self.teacher, self.student)
        return self.student(x), self.teacher(x)


class HiddenTeacher(MeanTeacher):
    def build_model(self):
        return HiddenNet()


class TargetNet(nn.Module):
    """As in Q-learning: the target is a copy, made again every few steps."""

    def __init__(self, every=5):
        super().__init__()
        self.online = nn.Linear(6, 4)
        self.target = nn.Linear(6, 4).requires_grad_(False)
        self.every = every
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            if self.steps % self.every == 0:
                self.target.load_state_dict(self.online.state_dict())
            self.steps += 1
        return self.online(x), self.target(x)


class QLearning(Distill):
    def build_model(self):
        return TargetNet()

    def loss(self, model, batch):
        x, action = batch
        now, then = model(x)
        wanted = x.sum(1) + 0.9 * then.max(1).values
        return F.smooth_l1_loss(now.gather(1, action[:, None])[:, 0], wanted)


class CopiedTarget(Distill):
    """The same, as a copy of the whole model that there is none of before the first step."""

    target, steps = None, 0

    def build_model(self):
        return net()

    def loss(self, model, batch):
        x, y = batch
        if model.training:
            if self.steps % 2 == 0:
                self.target = copy.deepcopy(model).requires_grad_(False).eval()
            self.steps += 1
        return F.cross_entropy(model(x), y) + self.consistency(model(x), self.target(x))


class Averaged(Distill):
    def build_model(self):
        model = net()
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        return model

    def loss(self, model, batch):
        x, y = batch
        if model.training:
            self.average.update_parameters(model)
        ours = model(x)
        with torch.no_grad():
            theirs = self.average(x)
        return F.cross_entropy(ours, y) + F.mse_loss(ours, theirs)


class FrozenTeacher(Distill):
    def build_model(self):
        teacher = net().eval().requires_grad_(False)
        self.teach = teacher
        return net()

    def loss(self, model, batch):
        return self.consistency(model(batch[0]), self.teach(batch[0]))
