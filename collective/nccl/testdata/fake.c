// A fake of libnccl and libcudart in tests: the ranks are threads of one process, "the GPU" is memory of the heap, and what is put
// into a stream is done at once. Prototypes are those of nccl.h (2.23) and cuda_runtime_api.h.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER;

// CUDA's runtime.
static long live;
long fakeLive(void) { return live; }
int cudaRuntimeGetVersion(int *v) { *v = 12040; return 0; }
int cudaGetDeviceCount(int *n) { char *s = getenv("FAKE_GPUS"); *n = s ? atoi(s) : 8; return 0; }
int cudaSetDevice(int d) { return d < 8 ? 0 : 101; }
int cudaMalloc(void **p, size_t n) { *p = malloc(n); __sync_fetch_and_add(&live, 1); return *p ? 0 : 2; }
int cudaFree(void *p) { if (p) __sync_fetch_and_sub(&live, 1); free(p); return 0; }
int cudaMemcpy(void *to, const void *from, size_t n, int kind) { if (kind != 1 && kind != 2) return 21; memcpy(to, from, n); return 0; }
int cudaStreamCreate(void **s) { *s = malloc(1); __sync_fetch_and_add(&live, 1); return 0; }
int cudaStreamDestroy(void *s) { __sync_fetch_and_sub(&live, 1); free(s); return 0; }
static __thread int queries;
int cudaStreamQuery(void *s) { return s == 0 ? 400 : ++queries % 3 ? 600 : 0; }
const char *cudaGetErrorString(int e) { return e == 101 ? "invalid device ordinal" : "some error of CUDA"; }

// NCCL.
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct message { struct message *next; int from, to; size_t n; char data[]; } message;
typedef struct group { char id[128]; int size, here, left; const void *slot[64]; long key[64]; int color[64]; struct group *made[64]; message *mail; struct group *next; } group;
typedef struct { group *g; int rank; } comm;
static group *groups;
static int ids;

int ncclGetVersion(int *v) { *v = 22304; return 0; }
const char *ncclGetErrorString(int e) { return e == 5 ? "invalid usage" : "some error of NCCL"; }
int ncclGetUniqueId(ncclUniqueId *id) { memset(id, 7, sizeof *id); id->internal[127] = ++ids; return 0; }

// barrier returns when all ranks have arrived. Two of them keep a round from running into the next.
static void barrier(group *g) {
  int round = g->left;
  if (++g->here == g->size) { g->here = 0; g->left++; pthread_cond_broadcast(&news); }
  while (g->left == round) pthread_cond_wait(&news, &mu);
}

int ncclCommInitRankScalable(comm **out, int nranks, int rank, int nId, ncclUniqueId *id, void *config) {
  if (nId != 1 || rank < 0 || rank >= nranks || config) return 5;
  pthread_mutex_lock(&mu);
  group *g = groups;
  while (g && memcmp(g->id, id, sizeof g->id)) g = g->next;
  if (!g) { g = calloc(1, sizeof *g); memcpy(g->id, id, sizeof g->id); g->size = nranks; g->next = groups; groups = g; }
  *out = malloc(sizeof **out);
  **out = (comm){g, rank};
  barrier(g);
  pthread_mutex_unlock(&mu);
  __sync_fetch_and_add(&live, 1);
  return 0;
}
int ncclCommDestroy(comm *c) { __sync_fetch_and_sub(&live, 1); free(c); return 0; }
int ncclCommAbort(comm *c) { return ncclCommDestroy(c); }
int ncclCommGetAsyncError(comm *c, int *e) { *e = 0; return c ? 0 : 4; }

int ncclCommSplit(comm *c, int color, int key, comm **out, void *config) {
  group *g = c->g;
  if (config) return 5;
  pthread_mutex_lock(&mu);
  g->color[c->rank] = color; g->key[c->rank] = key;
  barrier(g);
  int rank = 0, size = 0, first = -1;
  for (int r = 0; r < g->size; r++) if (g->color[r] == color) {
    if (first < 0) first = r;
    size++;
    if (g->key[r] < key || (g->key[r] == key && r < c->rank)) rank++;
  }
  if (color >= 0 && first == c->rank) { g->made[first] = calloc(1, sizeof *g); g->made[first]->size = size; }
  barrier(g);
  *out = 0;
  if (color >= 0) { *out = malloc(sizeof **out); **out = (comm){g->made[first], rank}; __sync_fetch_and_add(&live, 1); }
  barrier(g);
  pthread_mutex_unlock(&mu);
  return 0;
}

#define COMBINE(T) { T *d = dst; const T *s = src; for (size_t i = 0; i < n; i++) d[i] = op == 0 ? d[i] + s[i] : op == 1 ? d[i] * s[i] : op == 2 ? (d[i] > s[i] ? d[i] : s[i]) : (d[i] < s[i] ? d[i] : s[i]); } break
static size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8};
static void combine(void *dst, const void *src, size_t n, int type, int op) {
  switch (type) {
    case 0: COMBINE(int8_t); case 1: COMBINE(uint8_t); case 2: COMBINE(int32_t); case 3: COMBINE(uint32_t);
    case 4: COMBINE(int64_t); case 5: COMBINE(uint64_t); case 7: COMBINE(float); case 8: COMBINE(double);
  }
}

static int reduced(const void *src, void *dst, size_t n, int type, int op, int root, comm *c) {
  if (type > 8 || type == 6 || op > 3 || root >= c->g->size) return 4;
  group *g = c->g;
  pthread_mutex_lock(&mu);
  g->slot[c->rank] = src;
  barrier(g);
  if (root < 0 || root == c->rank) {
    memcpy(dst, g->slot[g->size - 1], n * sizes[type]); // an order of its own
    for (int r = g->size - 2; r >= 0; r--) combine(dst, g->slot[r], n, type, op);
  }
  barrier(g);
  pthread_mutex_unlock(&mu);
  return 0;
}
int ncclAllReduce(const void *src, void *dst, size_t n, int type, int op, comm *c, void *stream) { return stream ? reduced(src, dst, n, type, op, -1, c) : 4; }
int ncclReduce(const void *src, void *dst, size_t n, int type, int op, int root, comm *c, void *stream) { return stream ? reduced(src, dst, n, type, op, root, c) : 4; }

int ncclBroadcast(const void *src, void *dst, size_t n, int type, int root, comm *c, void *stream) {
  group *g = c->g;
  if (type != 1 || !stream) return 4;
  pthread_mutex_lock(&mu);
  g->slot[c->rank] = src;
  barrier(g);
  if (c->rank != root) memcpy(dst, g->slot[root], n);
  barrier(g);
  pthread_mutex_unlock(&mu);
  return 0;
}

static __thread struct { comm *c; void *to; size_t n; int from; } asked[256];
static __thread int grouped, asks;
static int fetch(comm *c, void *to, size_t n, int from) {
  pthread_mutex_lock(&mu);
  for (;;) {
    for (message **m = &c->g->mail; *m; m = &(*m)->next)
      if ((*m)->from == from && (*m)->to == c->rank) {
        message *one = *m;
        int code = one->n == n ? 0 : 5;
        if (!code) memcpy(to, one->data, n);
        *m = one->next;
        free(one);
        pthread_mutex_unlock(&mu);
        return code;
      }
    pthread_cond_wait(&news, &mu);
  }
}
int ncclGroupStart(void) { grouped++; return 0; }
int ncclGroupEnd(void) {
  int code = 0;
  if (--grouped) return 0;
  for (int i = 0; i < asks && !code; i++) code = fetch(asked[i].c, asked[i].to, asked[i].n, asked[i].from);
  asks = 0;
  return code;
}
int ncclSend(const void *src, size_t n, int type, int peer, comm *c, void *stream) {
  if (type != 1 || !stream || !n) return 4;
  message *m = malloc(sizeof *m + n), **end;
  *m = (message){0, c->rank, peer, n};
  memcpy(m->data, src, n);
  pthread_mutex_lock(&mu);
  for (end = &c->g->mail; *end; end = &(*end)->next) {}
  *end = m;
  pthread_cond_broadcast(&news);
  pthread_mutex_unlock(&mu);
  return 0;
}
int ncclRecv(void *dst, size_t n, int type, int peer, comm *c, void *stream) {
  if (type != 1 || !stream || !n) return 4;
  if (!grouped) return fetch(c, dst, n, peer);
  asked[asks].c = c; asked[asks].to = dst; asked[asks].n = n; asked[asks++].from = peer;
  return 0;
}
