/* Notes what power_cuts.py replays: every change of a name and every fsync below $CUTS_ROOT, in
 * order, and of each file that is synced a copy as it was then.
 *
 *   cc -shared -fPIC -o power_cuts.so power_cuts.c
 *   LD_PRELOAD=power_cuts.so CUTS_ROOT=/tmp/world CUTS_NOTES=/tmp/notes taser train ...
 *
 * A line of $CUTS_NOTES/notes is: kind, path, second path or copy; separated by tabs.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Held while something happens and is noted, so that the notes have the order of what happened. */
static pthread_mutex_t order = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int copies = 0;

static const char *absolute(int folder, const char *path, char *whole) {
  char name[64];
  ssize_t length = 0;
  if (path[0] == '/') return strncpy(whole, path, PATH_MAX);
  if (folder == AT_FDCWD) {
    if (!getcwd(whole, PATH_MAX)) return "";
    length = strlen(whole);
  } else {
    snprintf(name, sizeof name, "/proc/self/fd/%d", folder);
    length = readlink(name, whole, PATH_MAX - 1);
    if (length < 0) return "";
  }
  snprintf(whole + length, PATH_MAX - length, path[0] ? "/%s" : "%s", path);
  return whole;
}

static int inside(const char *path) {
  const char *root = getenv("CUTS_ROOT");
  size_t length = root ? strlen(root) : 0;
  return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static void note(const char *kind, const char *path, const char *second) {
  char file[PATH_MAX], line[3 * PATH_MAX];
  if (!inside(path) && !inside(second)) return;
  snprintf(file, sizeof file, "%s/notes", getenv("CUTS_NOTES"));
  int handle = REAL(open)(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  int length = snprintf(line, sizeof line, "%s\t%s\t%s\n", kind, path, second);
  if (handle < 0 || write(handle, line, length) != length) abort();
  close(handle);
}

static int noted(int result, const char *kind, int a, const char *from, int b, const char *to) {
  char first[PATH_MAX], second[PATH_MAX];
  int error = errno;
  if (!result) note(kind, absolute(a, from, first), to ? absolute(b, to, second) : "");
  pthread_mutex_unlock(&order);
  errno = error;
  return result;
}

#define CHANGE(call, kind, a, from, b, to) \
  pthread_mutex_lock(&order);              \
  return noted(call, kind, a, from, b, to)

int rename(const char *from, const char *to) {
  CHANGE(REAL(rename)(from, to), "rename", AT_FDCWD, from, AT_FDCWD, to);
}
int renameat(int a, const char *from, int b, const char *to) {
  CHANGE(REAL(renameat)(a, from, b, to), "rename", a, from, b, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  const char *kind = flags & RENAME_EXCHANGE ? "exchange" : "rename";
  CHANGE(REAL(renameat2)(a, from, b, to, flags), kind, a, from, b, to);
}
int link(const char *from, const char *to) {
  CHANGE(REAL(link)(from, to), "link", AT_FDCWD, from, AT_FDCWD, to);
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
  CHANGE(REAL(linkat)(a, from, b, to, flags), "link", a, from, b, to);
}
int unlink(const char *path) { CHANGE(REAL(unlink)(path), "remove", AT_FDCWD, path, 0, NULL); }
int unlinkat(int a, const char *path, int flags) {
  CHANGE(REAL(unlinkat)(a, path, flags), "remove", a, path, 0, NULL);
}
int rmdir(const char *path) { CHANGE(REAL(rmdir)(path), "remove", AT_FDCWD, path, 0, NULL); }
int remove(const char *path) { CHANGE(REAL(remove)(path), "remove", AT_FDCWD, path, 0, NULL); }
int mkdir(const char *path, mode_t mode) {
  CHANGE(REAL(mkdir)(path, mode), "folder", AT_FDCWD, path, 0, NULL);
}
int mkdirat(int a, const char *path, mode_t mode) {
  CHANGE(REAL(mkdirat)(a, path, mode), "folder", a, path, 0, NULL);
}

/* A file that is new, or emptied, when it is opened. */
static int opened(int handle, int is_new, int flags, int a, const char *path) {
  int error = errno;
  char whole[PATH_MAX];
  if (handle >= 0 && (is_new || (flags & O_TRUNC)) && (flags & O_ACCMODE) != O_RDONLY)
    note("file", absolute(a, path, whole), "");
  pthread_mutex_unlock(&order);
  errno = error;
  return handle;
}

#define OPEN(name, a, path, ...)                                            \
  mode_t mode = 0;                                                          \
  if (flags & (O_CREAT | O_TMPFILE)) {                                      \
    va_list rest;                                                           \
    va_start(rest, flags);                                                  \
    mode = va_arg(rest, mode_t);                                            \
    va_end(rest);                                                           \
  }                                                                         \
  pthread_mutex_lock(&order);                                               \
  int is_new = (flags & O_CREAT) && faccessat(a, path, F_OK, 0);            \
  return opened(REAL(name)(__VA_ARGS__, flags, mode), is_new, flags, a, path)

int open(const char *path, int flags, ...) { OPEN(open, AT_FDCWD, path, path); }
int open64(const char *path, int flags, ...) { OPEN(open64, AT_FDCWD, path, path); }
int openat(int a, const char *path, int flags, ...) { OPEN(openat, a, path, a, path); }
int openat64(int a, const char *path, int flags, ...) { OPEN(openat64, a, path, a, path); }

static FILE *streamed(FILE *file, int is_new, const char *how, const char *path) {
  int flags = strchr(how, 'w') ? O_WRONLY | O_TRUNC : strchr(how, 'a') ? O_WRONLY : O_RDONLY;
  opened(file ? 0 : -1, is_new, flags, AT_FDCWD, path);
  return file;
}
FILE *fopen(const char *path, const char *how) {
  pthread_mutex_lock(&order);
  int is_new = access(path, F_OK);
  return streamed(REAL(fopen)(path, how), is_new, how, path);
}
FILE *fopen64(const char *path, const char *how) {
  pthread_mutex_lock(&order);
  int is_new = access(path, F_OK);
  return streamed(REAL(fopen64)(path, how), is_new, how, path);
}

static int synced(int (*sync)(int), int handle) {
  char path[PATH_MAX], name[64], copy[PATH_MAX] = "";
  struct stat state;
  pthread_mutex_lock(&order);
  absolute(handle, "", path);
  if (inside(path) && !fstat(handle, &state)) {
    if (S_ISREG(state.st_mode)) {
      snprintf(name, sizeof name, "/proc/self/fd/%d", handle);
      snprintf(copy, sizeof copy, "%s/%d.%d", getenv("CUTS_NOTES"), getpid(), copies++);
      int from = REAL(open)(name, O_RDONLY | O_CLOEXEC);
      int to = REAL(open)(copy, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
      if (from < 0 || to < 0) abort();
      while (sendfile(to, from, NULL, 1 << 20) > 0) continue;
      close(from);
      close(to);
    }
    note("sync", path, copy);
  }
  int result = sync(handle), error = errno;
  pthread_mutex_unlock(&order);
  errno = error;
  return result;
}
int fsync(int handle) { return synced(REAL(fsync), handle); }
int fdatasync(int handle) { return synced(REAL(fdatasync), handle); }
