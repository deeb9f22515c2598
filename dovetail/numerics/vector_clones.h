// DT_VECTOR_CLONES before a function compiles its loops for AVX-512, AVX2 and plain x86-64; the
// loader picks one. Loops must not depend on the vector width: element by element, in lanes that
// the source fixes, or integer reductions.
//
// Sanitized builds have one version: the loader would choose before the sanitizer has started.
#pragma once

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define DT_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define DT_VECTOR_CLONES
#endif
