/* Fails the n-th write below a folder with ENOSPC: see failing_writes.py.

   Counted are opens that may write, writes, forced writes, new folders and links, and
   renames. Of a failing write one half reaches the file, as on a disk that fills, and
   that file takes no more. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char below[4096];
static long fails_at = -1, calls = 0;
static char is_below[65536], is_full[65536];

void arm(const char *folder, long number) {
  strncpy(below, folder, sizeof below - 1);
  calls = 0;
  fails_at = number;
}

long counted(void) { return calls; }

static int matches(const char *path) {
  return fails_at >= 0 && path && strncmp(path, below, strlen(below)) == 0;
}

static int marked(int fd) { return fd >= 0 && fd < 65536 && is_below[fd]; }

static int fails(void) {
  if (fails_at < 0 || __sync_add_and_fetch(&calls, 1) != fails_at) return 0;
  errno = ENOSPC;
  return 1;
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    int here = matches(path); \
    if (here && (flags & (O_WRONLY | O_RDWR | O_CREAT)) && fails()) return -1; \
    int fd = real(path, flags, mode); \
    if (fd >= 0 && fd < 65536) is_below[fd] = here; \
    return fd; \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int at, const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    int here = matches(path) || (path[0] != '/' && marked(at)); \
    if (here && (flags & (O_WRONLY | O_RDWR | O_CREAT)) && fails()) return -1; \
    int fd = real(at, path, flags, mode); \
    if (fd >= 0 && fd < 65536) is_below[fd] = here; \
    return fd; \
  }
OPENAT(openat)
OPENAT(openat64)

int close(int fd) {
  REAL(close);
  if (fd >= 0 && fd < 65536) is_below[fd] = is_full[fd] = 0;
  return real(fd);
}

ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  if (marked(fd)) {
    if (is_full[fd]) {
      errno = ENOSPC;
      return -1;
    }
    if (fails()) {
      /* One half still fits, and from then on nothing does. */
      is_full[fd] = 1;
      return size > 1 ? real(fd, data, size / 2) : -1;
    }
  }
  return real(fd, data, size);
}

#define PWRITE(name, offset_type) \
  ssize_t name(int fd, const void *data, size_t size, offset_type at) { \
    REAL(name); \
    if (marked(fd) && fails()) return -1; \
    return real(fd, data, size, at); \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int fd, const struct iovec *parts, int count) {
  REAL(writev);
  if (marked(fd) && fails()) return -1;
  return real(fd, parts, count);
}

int fsync(int fd) {
  REAL(fsync);
  return marked(fd) && fails() ? -1 : real(fd);
}

int fdatasync(int fd) {
  REAL(fdatasync);
  return marked(fd) && fails() ? -1 : real(fd);
}

int ftruncate64(int fd, off64_t size) {
  REAL(ftruncate64);
  return marked(fd) && fails() ? -1 : real(fd, size);
}

int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  return matches(path) && fails() ? -1 : real(path, mode);
}

int rename(const char *from, const char *to) {
  REAL(rename);
  return matches(to) && fails() ? -1 : real(from, to);
}

int renameat(int from_at, const char *from, int to_at, const char *to) {
  REAL(renameat);
  return (matches(to) || marked(to_at)) && fails() ? -1 : real(from_at, from, to_at, to);
}

int link(const char *from, const char *to) {
  REAL(link);
  return matches(to) && fails() ? -1 : real(from, to);
}
