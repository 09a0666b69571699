"""A clock that is an hour ahead for some processes, as on a machine whose clock is off."""

from __future__ import annotations

import subprocess
from pathlib import Path

LIBRARY = "shifted_clock.so"
SHIFTED_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#define AHEAD 3600
#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) real;
    if (!real) real = (__typeof__(&clock_gettime))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += AHEAD;
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    REAL(gettimeofday);
    int code = real(now, zone);
    if (code == 0) now->tv_sec += AHEAD;
    return code;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
/* deadlines by this clock, for the kernel, whose clock is right */
static struct timespec back(const struct timespec *until) {
    struct timespec shifted = *until;
    shifted.tv_sec -= AHEAD;
    return shifted;
}
int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    REAL(sem_timedwait);
    struct timespec shifted = back(until);
    return real(semaphore, &shifted);
}
int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
    REAL(pthread_mutex_timedlock);
    struct timespec shifted = back(until);
    return real(mutex, &shifted);
}
"""


def clock_ahead(folder: Path) -> dict[str, str]:
    """The variable that sets the clock of a process an hour ahead. Needs gcc; `folder` takes the library."""
    library = folder / LIBRARY
    (folder / "shifted_clock.c").write_text(SHIFTED_CLOCK)
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(folder / "shifted_clock.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}
