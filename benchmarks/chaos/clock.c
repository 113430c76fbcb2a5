/* Preloaded into the processes of a system: adds an offset from a file to their wall clocks, read at each call.
 *
 * The file that CHAOS_CLOCK names has one 64-bit number of seconds for each process id. libfaketime is no
 * alternative: with version 0.9.10, sleeps until a time of the monotonic clock fail. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static _Atomic int64_t *offsets;
static long n_offsets;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void)
{
    real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    struct stat found;
    if (fstat(file, &found) == 0 && found.st_size > 0) {
        void *mapped = mmap(NULL, (size_t)found.st_size, PROT_READ, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) {
            n_offsets = found.st_size / (long)sizeof *offsets;
            offsets = mapped;
        }
    }
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *now)
{
    int failed = real_clock_gettime ? real_clock_gettime(id, now) : (int)syscall(SYS_clock_gettime, id, now);
    if (!failed && offsets && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        long pid = getpid(); /* asked each time: a forked process has a clock of its own */
        if (pid < n_offsets)
            now->tv_sec += atomic_load_explicit(offsets + pid, memory_order_relaxed);
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0)
        return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds)
{
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0)
        return -1;
    if (seconds)
        *seconds = now.tv_sec;
    return now.tv_sec;
}
