/* Makes writing fail, for benchmarks/faults.py: preloaded into a program by the dynamic linker.

   FAULT_PATH   parts of the paths whose writing fails, with | between them
   FAULT_ERRNO  with which error
   FAULT_AFTER  bytes that are written before, in all
   FAULT_LOG    a file that is made once something failed  */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static long written;

static int among(const char *path, const char *parts) {
  char copy[1024], *rest = 0;
  snprintf(copy, sizeof copy, "%s", parts);
  for (char *part = strtok_r(copy, "|", &rest); part; part = strtok_r(0, "|", &rest))
    if (strstr(path, part)) return 1;
  return 0;
}

static int hit(int fd, size_t size) {
  const char *part = getenv("FAULT_PATH"), *number = getenv("FAULT_ERRNO");
  const char *after = getenv("FAULT_AFTER"), *log = getenv("FAULT_LOG");
  char link[64], path[4096];
  if (!part || !number) return 0;
  int before = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  errno = before;
  if (length < 0) return 0;
  path[length] = 0;
  if (!among(path, part)) return 0;
  if (__atomic_fetch_add(&written, size, __ATOMIC_SEQ_CST) + (long)size <= (after ? atol(after) : 0))
    return 0;
  if (log) close(open(log, O_CREAT | O_WRONLY, 0600));
  errno = atoi(number);
  return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
  return hit(fd, size) ? -1 : NEXT(write)(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t place) {
  return hit(fd, size) ? -1 : NEXT(pwrite)(fd, data, size, place);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t place) {
  return hit(fd, size) ? -1 : NEXT(pwrite64)(fd, data, size, place);
}
static size_t total(const struct iovec *parts, int count) {
  size_t sum = 0;
  for (int i = 0; i < count; i++) sum += parts[i].iov_len;
  return sum;
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
  return hit(fd, total(parts, count)) ? -1 : NEXT(writev)(fd, parts, count);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t place) {
  return hit(fd, total(parts, count)) ? -1 : NEXT(pwritev)(fd, parts, count, place);
}
